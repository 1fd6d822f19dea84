"""Workloads: one folder each, with its data, model, training and target."""
