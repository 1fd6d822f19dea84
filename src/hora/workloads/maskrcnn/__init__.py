"""Mask R-CNN finds objects in two stages, with their outlines."""
