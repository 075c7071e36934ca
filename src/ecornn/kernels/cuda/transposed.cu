// A matrix stored column by column: found[c][r] = values[r][c].
//
// A block makes a tile; blocks lie along the columns first. torch's own copy, each thread of which
// reads where the one beside it does not, took 118 µs on an H200 for 64 MiB.
#define CLUSTER 1
constexpr int THREADS = 256, SIDE = 64;

struct TransposeArguments {
  const float* values;  // (rows, columns)
  float* found;         // (columns, rows)
  long long values_row, found_row;  // from one row of each to the next
  int rows, columns;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    transposed(const __grid_constant__ TransposeArguments a) {
  __shared__ float tiles[SIDE][SIDE + 1];  // one more, so that a column lies in all banks
  const int column_tiles = (a.columns + SIDE - 1) / SIDE;
  const int r0 = blockIdx.x / column_tiles * SIDE, c0 = blockIdx.x % column_tiles * SIDE;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = warp; i < SIDE; i += THREADS / 32)
#pragma unroll
    for (int j = lane; j < SIDE; j += 32)
      if (r0 + i < a.rows && c0 + j < a.columns)
        tiles[i][j] = a.values[(r0 + i) * a.values_row + c0 + j];
  __syncthreads();
#pragma unroll
  for (int i = warp; i < SIDE; i += THREADS / 32)
#pragma unroll
    for (int j = lane; j < SIDE; j += 32)
      if (c0 + i < a.columns && r0 + j < a.rows)
        a.found[(c0 + i) * a.found_row + r0 + j] = tiles[j][i];
}
