"""What detection and segmentation share: parameters, the pretrained backbone, and the score without learning."""
