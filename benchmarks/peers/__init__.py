"""Engines that run one MoE layer, each in a process of its own; see worker.py."""
