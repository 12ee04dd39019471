"""LightningModules: how to learn. One file per algorithm, the same order of methods in each."""
