"""What a step gives back beside its tokens, and how it reaches the host."""
