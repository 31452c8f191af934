"""What detection and segmentation share: their parameters, the pretrained backbone under its heads, and the score
without learning.
"""
