"""One folder per paper: its configuration, equations, parameters and README."""
