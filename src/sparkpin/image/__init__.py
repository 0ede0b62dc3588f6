"""The canonical form of an image: layers and archives as bytes, sealed so that every engine gives the same digest."""
