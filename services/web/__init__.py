"""The pages that the service brings along: plain files, no build step, nothing from elsewhere."""
