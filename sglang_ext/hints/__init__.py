"""What clients say of their conversations: when one comes back, and that one is over."""
