"""Object detection and instance segmentation: Mask R-CNN over any backbone of four maps, and its evaluation on COCO's
format.
"""
