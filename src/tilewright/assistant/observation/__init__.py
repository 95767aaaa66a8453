"""What one forward and one decoding step cost, module by module: times, flops, bytes, memory, graph breaks."""
