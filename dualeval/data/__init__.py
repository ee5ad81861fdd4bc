"""Data sets: images in folders, manifests and published files; questions in the format of SQuAD."""
