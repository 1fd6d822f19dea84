"""ResNet v1.5 on images: the first workload."""
