"""Running the reference and its builds: the decoder, the text, the metrics."""
