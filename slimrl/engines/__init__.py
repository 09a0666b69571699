"""What training and rollouts ask of an inference engine, and the engines that answer."""
