"""What a training loop asks of evaluations. It imports results, backends and launch."""
