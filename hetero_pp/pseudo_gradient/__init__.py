"""What a replica sends each outer round: error feedback, top-k per chunk, quantiser, the contribution format."""
