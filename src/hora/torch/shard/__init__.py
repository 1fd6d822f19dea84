"""Optimizers whose state is spread over the ranks: ``DistributedOptimizer(..., shard="optimizer")``.

Gradients are summed so that each rank gets its share (reduce-scatter), each rank updates its share of the
parameters, and all get the result (all-gather). (Rajbhandari et al., "ZeRO: Memory Optimizations Toward
Training Trillion Parameter Models", arXiv:1910.02054, stage 1.)
"""
