// Package checkpoint writes and reads files of named tensors.
//
// The format is safetensors, which most tools can read: eight bytes with the length N of the header (little-endian), N bytes
// of JSON, then the elements of all tensors, raw, little-endian, row-major, one after the other:
//
//	{"__metadata__":{"seed":"1"},"/dense/weights":{"dtype":"F32","shape":[64,10],"data_offsets":[0,2560]}, …}
//
// Offsets count from the end of the header. There is nothing in such a file to execute, and [Read] believes none of its
// numbers before it has held them against the length of the file.
package checkpoint
