"""The control plane: ranks meet here, share out chunks, report their progress, and learn of failures."""
