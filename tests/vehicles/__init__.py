"""What tests run, play or make: models, data, workers, devices."""
