"""What the connectors of all engines share: how a block's name covers an engine's configuration."""
