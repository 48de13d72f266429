"""What the simulator is asked: conversations, agents, documents, traces, models and machines."""
