"""The control plane: where ranks meet, share out chunks, tell how far they are, and learn that one failed."""
