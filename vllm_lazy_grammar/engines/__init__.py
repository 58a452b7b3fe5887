"""Grammar engines behind the `Engine` protocol: each engine's package is imported by one module here and nowhere else."""
