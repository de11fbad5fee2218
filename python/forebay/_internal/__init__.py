"""What only Forebay's own modules use."""
