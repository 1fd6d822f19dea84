"""SSD finds objects in one pass: the boxes of single-shot detection."""
