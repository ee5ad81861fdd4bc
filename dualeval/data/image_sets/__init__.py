"""How images with a label each lie, a file a kind, as ``KINDS`` of ``data/set_names.py`` names them.

Caller: ``tasks/image_data.py``. Keep: the same pixels and labels, however they lie.
"""
