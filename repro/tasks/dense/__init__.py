"""Common parts of detection and segmentation: parameters, the pretrained backbone, and a baseline without learning."""
