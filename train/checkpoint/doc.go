// Package checkpoint writes and reads files of named tensors ([Save], [Load]), and folders of snapshots from
// which training resumes ([Manager], [Latest]).
//
// # Files
//
// The format is safetensors, which most tools can read. A file has eight bytes with the length N of the
// header (little-endian), N bytes of JSON, and then the elements of all tensors: raw, little-endian,
// row-major, without gaps:
//
//	{"__metadata__":{"seed":"1"},"/dense/weights":{"dtype":"F32","shape":[64,10],"data_offsets":[0,2560]}, …}
//
// Offsets count from the end of the header. A file contains no executable code, and [Read] checks every
// number against the length of the file before it uses it.
//
// # Snapshots
//
// A snapshot is a folder with one such file, a manifest (JSON) and the SHA-256 of both, in the format of the
// command sha256sum. It is written atomically: under a temporary name, then synced and renamed. Every byte is
// verified against a checksum on load.
package checkpoint
