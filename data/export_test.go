package data

// EncodeElement and DecodeElement are those of CacheDir.
var (
	EncodeElement = encodeElement
	DecodeElement = decodeElement
)
