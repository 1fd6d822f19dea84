"""Pictures with objects in them, for detection: made from real photos, or COCO's; boxes, masks and AP."""
