"""What modules written for slime import, made of slimrl's own parts; the table is `slime`."""
