"""One folder a paper: its configuration, equations, parameters and README."""
