// Package checkpoint writes and reads files of named tensors ([Save], [Load]), and folders of snapshots from which a training goes on
// ([Manager], [Latest]).
//
// # Files
//
// The format is safetensors, which most tools can read: eight bytes with the length N of the header (little-endian), N bytes
// of JSON, then the elements of all tensors, raw, little-endian, row-major, one after the other:
//
//	{"__metadata__":{"seed":"1"},"/dense/weights":{"dtype":"F32","shape":[64,10],"data_offsets":[0,2560]}, …}
//
// Offsets count from the end of the header. There is nothing in such a file to execute, and [Read] believes none of its
// numbers before it has held them against the length of the file.
//
// # Snapshots
//
// A snapshot is a folder with such a file, a manifest (JSON) and the SHA-256 of both, as the command sha256sum checks it. It is written
// under another name, synced and renamed, so that it is there whole or not at all; and read only if every byte is as it was written.
package checkpoint
