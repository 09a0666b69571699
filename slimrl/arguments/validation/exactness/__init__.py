"""Rules about numerical equality."""
