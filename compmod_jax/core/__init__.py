"""What everything else stands on: errors, configurations, losses, intermediates, sharding."""
