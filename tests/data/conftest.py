"""What tests of data have in common."""

from dualeval.vision_library import torchvision

# Imported here, not in the first test that needs it: the import sets an environment variable.
torchvision()
