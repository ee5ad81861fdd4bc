"""Average precision of boxes, masks and keypoints, as COCO defines it, by pycocotools.

Begin with ``average_precision.py``; ``annotations.py`` makes COCO's annotations of columns.

Callers: ``dualeval.metrics``, where the metric is asked for; comparison, for its replicates. Keep: the
figures are pycocotools' own, to the last bit. The folder can be taken out.
"""
