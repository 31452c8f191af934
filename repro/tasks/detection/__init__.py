"""Object detection and instance segmentation: Mask R-CNN over any four-map backbone, scored by COCO's rules."""
