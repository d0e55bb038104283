"""Configuration: YAML groups and the typed schema. The leaf that every other package may import."""
