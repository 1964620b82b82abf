"""The Hopper backend: a tile of positions as one kernel, its weights on chip."""
