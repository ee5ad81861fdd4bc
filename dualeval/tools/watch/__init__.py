"""Every checkpoint of a training, evaluated once, while the training goes on."""
