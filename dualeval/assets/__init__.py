"""Files of the embedded job: the Fashion-MNIST test set and the weights of a small network."""
