"""What the three services share: frames, streams, directory, configuration, errors, randomness."""
