"""What a model costs: FLOPs and bytes of any config, from its sizes alone."""
