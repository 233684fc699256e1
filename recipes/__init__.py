"""Runnable recipes: training, comparison, plots, benchmarks."""
