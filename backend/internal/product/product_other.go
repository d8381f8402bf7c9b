//go:build (!amd64 && !arm64) || noasm

package product

var sets = [...]set{Plain: plain}

// best is the level of this build.
var best = Plain

// levels lists the levels of this build.
func levels() []Level { return []Level{Plain} }
