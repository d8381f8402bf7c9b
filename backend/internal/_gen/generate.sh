#!/bin/sh
# Writes the assembly of packages product and vector.
set -e
cd "$(dirname "$0")"
go run ./product -table ../product/table_amd64.go
go run ./product -out ../product/avx2_amd64.s -stubs ../product/avx2_amd64.go -pkg product
go run ./product -avx512 -out ../product/avx512_amd64.s -stubs ../product/avx512_amd64.go -pkg product
go run ./product -neon ../product
go run ./vector -out ../vector/avx2_amd64.s -stubs ../vector/avx2_amd64.go -pkg vector
go run ./vector -neon ../vector
