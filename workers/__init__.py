"""What runs on the node outside the engine: environments, servers, evidence, load."""
