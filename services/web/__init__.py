"""The web pages: plain files without a build step or foreign resources."""
