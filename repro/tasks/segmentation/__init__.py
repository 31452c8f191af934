"""Semantic segmentation: UperNet on the maps of an adapter, on ADE20K. Only this package imports mmsegmentation."""
