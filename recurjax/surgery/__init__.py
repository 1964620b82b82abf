"""Models made from models: what pretrained weights become in another variant."""
